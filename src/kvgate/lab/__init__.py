"""Simulator, storm, scripted engine: what the tests, the demo and the benchmarks share.

Production code imports none of it.
"""
