"""What a pass is given, and what several of its questions come to for model, machine and software together."""
