"""Files for Triton: a package of models with deployment.json, and the record of a running server.

config           a model's config.pbtxt
text_models      the models around an engine: preprocessing, postprocessing, ensemble, tensorrt_llm_bls
repository       files of a model repository, written and verified
deployment       deployment.json
running          which servers of a store are running
"""
