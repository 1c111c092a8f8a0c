"""Calls of tools: how the families of models write them, and how they are read out of an answer as it comes."""
