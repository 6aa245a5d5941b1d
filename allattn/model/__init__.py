"""The model: one class for all-attention and Transformer-XL (`transformer.TransformerLM`)."""
