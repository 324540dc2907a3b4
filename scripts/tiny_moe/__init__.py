"""Parts of `train_tiny_moe.py`: corpus, tokenizer, network, training, checkpoint, evaluation and model card."""
