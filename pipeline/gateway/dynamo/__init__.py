"""A worker of NVIDIA Dynamo in front of Triton, in the place of the gateway: Dynamo's frontend speaks OpenAI's API.

    python -m pipeline.gateway.dynamo --package PACKAGE --triton 127.0.0.1:8001

The frontend applies the chat template, tokenizes, chooses a worker and makes text of tokens; the worker passes token
ids on to Triton and back. Neither the gateway nor the response cache takes part. `__main__` needs ai-dynamo (the extra
`dynamo`), the other modules do not. Facts of Dynamo are in `contracts/data/dynamo.yaml`.
"""
