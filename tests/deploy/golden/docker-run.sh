#!/bin/sh
# llama behind Triton in a container, by pipeline 0.1.0.
# Needs Docker, the NVIDIA Container Toolkit, and driver 590.44.01 or newer.
# Ready within 184 s; it ends with this command. OpenAI's API in front of it:
#   pipeline gateway --package /srv/package --endpoint 127.0.0.1:8001
exec docker \
  run \
  --rm \
  --init \
  --name pipeline-llama \
  --gpus 1 \
  --shm-size=2048m \
  --ulimit memlock=-1 \
  --ulimit stack=67108864 \
  --stop-timeout=20 \
  -p 127.0.0.1:8001:8001 \
  -p 127.0.0.1:8002:8002 \
  --mount type=bind,source=/srv/package,target=/deployment,readonly \
  --env PIPELINE_TRITON_GRPC=127.0.0.1:8001 \
  nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3 \
  /opt/tritonserver/bin/tritonserver \
  --model-repository=/deployment/model_repository \
  --disable-auto-complete-config \
  --backend-config=python,shm-region-prefix-name=pipeline-llama-r0- \
  --backend-config=python,stub-timeout-seconds=184 \
  --exit-timeout-secs=5 \
  --model-control-mode=none \
  --http-restricted-api=model-repository,shared-memory,trace,logging:disabled:=disabled \
  --grpc-restricted-protocol=model-repository,shared-memory,trace,logging:disabled:=disabled \
  --allow-http=false \
  --grpc-address=0.0.0.0 \
  --grpc-port=8001 \
  --metrics-address=0.0.0.0 \
  --metrics-port=8002
