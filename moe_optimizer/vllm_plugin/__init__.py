"""The part that touches vLLM: patches as data, the experts class, proof files, and the launcher.

Importing this package imports no vLLM; the modules that need it import it when they are used inside a
vLLM process. Everything here carries out a Plan and decides nothing.
"""
