"""Values of a recipe tried on a real server, and the better ones written as a new recipe: `pipeline tune`.

settings      settings of a search
run           a search from its settings to the report
search_space  keys that are tried, with their values and reasons
objective     scores of trials: objectives, and how far a trial is from the SLO
study         all trials of one search, kept by Optuna in a folder of the store
search        the loop: settings that the plan refuses are left out, hopeless trials are stopped
runner        one trial for real: built, served, measured
conclusion    the best trial against the recipe as it is, in interleaved rounds
report        trials, costs and the recommendation as JSON
tuned_recipe  the recipe with the recommended changes
handover      the trials as a script for another machine, and its results back
"""
