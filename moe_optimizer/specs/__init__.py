"""Holds frozen facts about models, hardware and workloads; no decisions, no I/O."""
