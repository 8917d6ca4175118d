"""What a trained model is used for. It never trains."""
