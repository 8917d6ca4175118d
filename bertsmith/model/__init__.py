"""The Transformer encoder of BERT and its heads. It never knows of text or of files."""
