"""Our experts classes inside vLLM: which kernel computes a layer, in which weight format, and whether it is right."""
