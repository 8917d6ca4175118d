"""BERT: embeddings, encoder, output heads, and models for pre-training and fine-tuning."""
