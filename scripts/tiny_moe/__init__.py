"""Holds the parts of `train_tiny_moe.py`: corpus, tokenizer, network, training, checkpoint, evaluation, model card."""
