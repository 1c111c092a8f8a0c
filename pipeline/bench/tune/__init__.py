"""Values of a recipe tried on a real server, and the better ones written as a new recipe: `pipeline tune`.

settings      settings of a search
run           a search from its settings to the report
search_space  keys that are tried, with their values and reasons
objective     trials and their scores: objectives, and how far a trial is from the SLO
race          first seconds of a trial held against the whole loads of others
surrogate     a model of what settings are worth, which proposes the next trial
study         all trials of one search, kept in a folder of the store
search        the loop: settings that the plan refuses are left out, hopeless ones and those behind are stopped
conclusion    the best trial against the recipe as it is, in interleaved rounds
report        trials, costs and the recommendation as JSON
handover      the trials as a script for another machine, and its results back
"""
