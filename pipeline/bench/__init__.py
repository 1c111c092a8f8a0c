"""Load on a deployment, and what it saw: `pipeline bench`; two deployments beside each other: `pipeline compare`.

subject     what is measured, and how it is reached
workload    what is asked: conversations, of words at random of given lengths
prompt_file the same of a file, a calibration set or a trace
arrivals    when: so many at a time, at random times, or at the times of a trace
targets     whom: Triton by our client, or an OpenAI gateway
load        asks, and takes the times of every request
statistics  percentiles with intervals
result      the figures of a run: JSON, and its schema
summary     how they are computed from what requests saw, and held against the recipe's SLO
run         all of this, from options to a result
sweep       one load after the other, until the SLO breaks
verdict     the run in a sentence, and why to mistrust it
forecast    what `pipeline plan` says of the same loads
calibrate   what they tell of the plan's constants: `pipeline plan --calibrate-from`
page        the run as one HTML file

compare       two runs, deployments or packages, in turns; budgets; the result as JSON
sides         where the two come from
ratios        the ratio of a figure over rounds, with its interval and a test
comparison    all figures of the two, and whether they differ or it was noise
answers       golden questions to both: equal, similar, right, and how perplexed each is by the other's
engine_model  the engine's own model, asked with token ids
judge         a model that says which answer is better
compare_page  the comparison as one HTML file
"""
