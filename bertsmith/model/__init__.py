"""BERT: encoder, output heads, fine-tuning models and weight initialization."""
