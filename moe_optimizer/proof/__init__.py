"""The evidence: what each process wrote about itself, what it means for a plan, and how it is shown."""
