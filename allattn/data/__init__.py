"""Text in, batches out: tokenizers, corpus preparation and the lanes that training reads."""
