"""Other people's descriptions of models, read: Hugging Face configurations."""
