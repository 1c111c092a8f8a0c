# TensorRT-LLM behind Triton: one image that builds engines and one that serves them, both on the same upstream image, so
# that what was built is what runs; and a small one with the OpenAI gateway, which needs no GPU.
#
#   docker build --target build -t pipeline-build .
#   docker build --target serve -t pipeline-serve .
#   docker build --target gateway -t pipeline-gateway .
#   docker build --target group -t pipeline-group .        where one model needs several machines
#   docker build --target dynamo -t pipeline-dynamo .      frontend and worker of NVIDIA Dynamo, in the gateway's place
#   docker run --gpus all --shm-size=2g --ulimit memlock=-1 --ulimit stack=67108864 \
#     --mount type=bind,source=PACKAGE,target=/deployment,readonly -p 8001-8002:8001-8002 pipeline-serve
#
# `pipeline deploy RECIPE --target docker` writes the exact line for a package, `--target compose` all services for it;
# compose.yaml has them for any. Another version of TensorRT-LLM is another TRITON_IMAGE: `pipeline versions VERSION` prints the
# command. Where no image of NVIDIA's has Triton and that TensorRT-LLM, it is the stage `joined`, made of the other two.
ARG TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3
ARG TRTLLM_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc29
ARG PLAIN_TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.08-py3
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# The wheel, made once for all.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
COPY model_repo model_repo
COPY calibration calibration
COPY recipes recipes
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# TensorRT-LLM's own image with Triton's server and Python backend in it, and the libraries that those are linked with: what
# upstream's docker/Dockerfile.multi and install_triton.sh do for their tests of the Triton model. docs/adr/0019 says why not
# the other way round.
FROM ${PLAIN_TRITON_IMAGE} AS plain-triton
FROM ${TRTLLM_IMAGE} AS joined
COPY --from=plain-triton /opt/tritonserver/bin /opt/tritonserver/bin
COPY --from=plain-triton /opt/tritonserver/lib /opt/tritonserver/lib
COPY --from=plain-triton /opt/tritonserver/backends/python /opt/tritonserver/backends/python
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        datacenter-gpu-manager-4-cuda13 libarchive-dev libb64-dev libnuma-dev libre2-dev libxml2-dev \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/tritonserver/bin:${PATH}

# The extras hub and calibrate in an environment of its own, because it pins torch and ModelOpt for itself; trtllm-build is the
# image's. The store is a volume: what was built outlives the container.
FROM ${TRITON_IMAGE} AS build
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m venv --without-pip /opt/pipeline \
    && wheel=$(find /wheels -name 'trtllm_pipeline-*.whl') \
    && python3 -m pip --python /opt/pipeline/bin/python install --no-cache-dir "${wheel}[hub,calibrate,objects]" "tokenizers>=0.22" \
    && ln -s /opt/pipeline/bin/pipeline /usr/local/bin/pipeline \
    && install --directory --owner=1000 --group=1000 /store /home/pipeline
ENV HOME=/home/pipeline \
    PIPELINE_STORE=/store
VOLUME /store
WORKDIR /home/pipeline
USER 1000:1000
ENTRYPOINT ["pipeline"]
CMD ["--help"]

# Packages that our models import, in the image's own Python, in which Triton runs them. Nothing that is there already changes
# for it, but the pins of pipeline/contracts/data/images.yaml, which says why; and the build ends here if packages do not
# agree, a module does not load or a library is missing. Triton alone serves a package with this image, too.
FROM ${TRITON_IMAGE} AS models
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    wheel=$(find /wheels -name 'trtllm_pipeline-*.whl') \
    && PYTHONPATH="$wheel" python3 -m pipeline.machine.image_build prepare /tmp/image \
    && python3 -m pip install --no-cache-dir --break-system-packages \
        --constraint /tmp/image/constraints.txt --requirement /tmp/image/requirements.txt \
    && PYTHONPATH="$wheel" python3 -m pipeline.machine.image_build check /tmp/image \
    && rm -r /tmp/image

# The core of pipeline beside that Python: /opt/pipeline sees its packages, so that their versions can be checked. The extra
# gateway is for what stands in front of Triton's ports.
FROM models AS serve
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m venv --without-pip --system-site-packages /opt/pipeline \
    && wheel=$(find /wheels -name 'trtllm_pipeline-*.whl') \
    && python3 -m pip --python /opt/pipeline/bin/python install --no-cache-dir "${wheel}[gateway,objects]" \
    && ln -s /opt/pipeline/bin/pipeline /usr/local/bin/pipeline \
    && install --directory --owner=1000 --group=1000 /home/pipeline
ENV HOME=/home/pipeline \
    PIPELINE_PACKAGE=/deployment \
    PIPELINE_READY_FILE=/tmp/pipeline/ready.json
WORKDIR /home/pipeline
EXPOSE 8001 8002
# Green after the warm-up, and only while a generation comes back. A model of 140 GiB takes 20 minutes to load.
HEALTHCHECK --interval=2s --timeout=5s --start-period=30m --retries=1 \
    CMD ["/opt/pipeline/bin/python", "-m", "pipeline.serving.health"]
USER 1000:1000
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "/opt/pipeline/bin/python", "-m", "pipeline.serving.entrypoint"]

# Several machines: the same, with the SSH server by which mpirun starts ranks on the others. It runs as the image's user,
# who must have a name for it; or as root, who may pin memory for RDMA, and then separates privileges in /run/sshd.
FROM serve AS group
USER root
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* \
    && (getent passwd 1000 || useradd --uid 1000 --home-dir /home/pipeline --shell /bin/sh pipeline) \
    && install --directory --mode=0755 /run/sshd
EXPOSE 2222
USER 1000:1000

# The gateway: OpenAI's API and the response cache in front of Triton, over gRPC. It sees the package for its tokenizer,
# and the store for a cache that is a file.
FROM ${PYTHON_IMAGE} AS gateway
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m venv /opt/pipeline \
    && wheel=$(find /wheels -name 'trtllm_pipeline-*.whl') \
    && /opt/pipeline/bin/python -m pip install --no-cache-dir "${wheel}[gateway,cache,pgvector,traces,objects]" \
    && install --directory --owner=1000 --group=1000 /store /home/pipeline
ENV HOME=/home/pipeline \
    PIPELINE_STORE=/store
WORKDIR /home/pipeline
EXPOSE 8080
# Green while the gateway's own check says that its models answer.
HEALTHCHECK --interval=2s --timeout=5s --start-period=1m --retries=1 \
    CMD ["/opt/pipeline/bin/python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/readyz', timeout=4)"]
USER 1000:1000
ENTRYPOINT ["/opt/pipeline/bin/pipeline"]
CMD ["gateway", "--help"]

# Dynamo's frontend, and the worker that stands in front of Triton there. A dependency comes from NVIDIA's index.
FROM ${PYTHON_IMAGE} AS dynamo
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m venv /opt/pipeline \
    && wheel=$(find /wheels -name 'trtllm_pipeline-*.whl') \
    && /opt/pipeline/bin/python -m pip install --no-cache-dir "${wheel}[dynamo]" \
    && install --directory --owner=1000 --group=1000 /home/pipeline
ENV HOME=/home/pipeline
WORKDIR /home/pipeline
USER 1000:1000
ENTRYPOINT ["/opt/pipeline/bin/python", "-m"]
CMD ["dynamo.frontend", "--help"]

# Both in one, for scripts/accept_on_gpu: builds, serves and checks a recipe, and writes a report. What the first stage
# pins lies in /opt/pipeline, in front of the image's own packages; Triton and trtllm-build run with those.
FROM serve AS accept
USER root
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    wheel=$(find /wheels -name 'trtllm_pipeline-*.whl') \
    && python3 -m pip --python /opt/pipeline/bin/python install --no-cache-dir "${wheel}[hub,calibrate,gateway,bench]" \
    && install --directory --owner=1000 --group=1000 /store /reports
ENV PIPELINE_STORE=/store
VOLUME /store
WORKDIR /reports
HEALTHCHECK NONE
USER 1000:1000
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "/opt/pipeline/bin/pipeline", "accept"]
CMD ["--help"]
