"""Values of a recipe tried on a real server, and the better ones written as a new recipe: `pipeline tune`.

search_space  which keys are tried, with which values, and why
objective     from the figures of a trial to what is optimized, and how far it is from the SLO
study         all trials of one search, kept by Optuna in a folder of the store
search        the loop: what the plan refuses is left out, what breaks the SLO by far is stopped
serving       one trial for real: built, served, measured
confirmation  the best trial against the recipe as it is, in interleaved rounds
report        trials, costs and the recommendation as JSON, and the tuned recipe
handover      the trials as a script for another machine, and its results back
"""
