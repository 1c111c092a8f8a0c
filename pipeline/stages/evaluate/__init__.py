"""How far a quantized checkpoint is from its original on held-out text, and whether that is near enough.

comparison.py   measures, with torch: every checkpoint is computed layer by layer from its files (decoder.py)
results.py      the figures, and their file
gate.py         holds them against the recipe's budgets, and writes report.json and report.html
"""
