"""Finds the plan that serves a workload best on this machine: passes and settings that win when they are measured."""
