"""Files for Triton: a package of models with deployment.json, and the record of a running server.

config           a model's config.pbtxt
text_models      the models around an engine: preprocessing, postprocessing, ensemble, tensorrt_llm_bls
repository       files of a model repository
deployment       deployment.json
integrity        whether a package is what was built
running          which servers of a store are running
"""
