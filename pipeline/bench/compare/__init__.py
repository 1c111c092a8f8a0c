"""Two deployments beside each other: `pipeline compare`.

settings  settings of a comparison
run       two runs, deployments or packages, in turns; budgets; the result as JSON
figures   figures of the two under the same loads: ratio, interval, test and verdict
answers   golden questions to both: equal, similar, right, and how perplexed each is by the other's answers
judge     a model that says which answer is better
page      the result as one HTML file
"""
