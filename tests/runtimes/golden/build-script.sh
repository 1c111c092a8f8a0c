#!/usr/bin/env bash
# Engines of tiny: target (1 rank) and draft (1 rank), built by trtllm-build of TensorRT-LLM 1.2.1.
#
# Where: a machine with l4-24g (SM 89), and either TensorRT-LLM 1.2.1 (trtllm-build on PATH, as inside
#        NVIDIA's containers), or Docker with the NVIDIA Container Toolkit. Docker takes the very container that will
#        serve the engines: nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3
# Needs: the checkpoints below; copy them where the machine does not see them, and set the variables.
# Makes: in $OUT, a folder for each engine, with checksums. What is finished is not built again.
# Then:  bring the folders to where this script was printed, and there run
#          pipeline adopt tiny.yaml build.target tiny-engines/target
#          pipeline adopt tiny.yaml build.draft tiny-engines/draft
#          pipeline build tiny.yaml
set -euo pipefail

# What may be set from outside, and what it is otherwise.
OUT=${OUT:-$PWD/tiny-engines}
TARGET_CHECKPOINT=${TARGET_CHECKPOINT:-/store/checkpoint} # 9 B
DRAFT_CHECKPOINT=${DRAFT_CHECKPOINT:-/store/checkpoint} # 9 B
GPUS=${GPUS:-}         # numbers, as in 0,1; empty: all
IMAGE=${IMAGE:-nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3}
DOCKER=${DOCKER:-docker}

version=1.2.1
sm=89

fail() {
  printf '%s\n' "$*" >&2
  exit 1
}

# The GPUs: an engine runs only on the kind that built it.
command -v nvidia-smi >/dev/null || fail "no nvidia-smi: this is not a machine with an NVIDIA GPU"
gpus=() gpu='' driver=''
while IFS=, read -r index _ name capability _ _ gpu_driver; do
  index=${index// /}
  case ",${GPUS:-$index}," in *",$index,"*) ;; *) continue ;; esac
  capability=${capability// /}
  [ "${capability/./}" = "$sm" ] || fail "GPU $index is${name} (SM ${capability/./}); this is for l4-24g (SM $sm); GPUS=… chooses"
  gpus+=("$index") gpu=${name# } driver=${gpu_driver// /}
done < <(nvidia-smi --query-gpu=index,uuid,name,compute_cap,memory.total,memory.free,driver_version --format=csv,noheader,nounits)
[ "${#gpus[@]}" -ge 1 ] || fail "GPUs needed: 1; found: ${#gpus[@]}"

# The builder: of the version that will serve.
ask='import importlib.metadata; print(importlib.metadata.version("tensorrt_llm"))'
image='' digest='' container=pipeline-build-$$
options=(--rm --init --name "$container" --workdir /build/work)
if command -v trtllm-build >/dev/null; then
  # shellcheck disable=SC2046 # the first line of the program may be several words
  found=$($(sed -n '1s/^#! *//p' "$(command -v trtllm-build)") -c "$ask" 2>/dev/null) || found=unknown
else
  command -v "$DOCKER" >/dev/null || fail "neither trtllm-build nor $DOCKER is on PATH"
  "$DOCKER" image inspect "$IMAGE" >/dev/null 2>&1 || "$DOCKER" pull "$IMAGE"
  image=$IMAGE
  digest=$("$DOCKER" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$IMAGE" | sed -n 1p)
  run=${digest:-$IMAGE} # what was looked at is what is run
  security=$("$DOCKER" info --format '{{json .SecurityOptions}}')
  case $security in *name=rootless*) ;; *) options+=(--user "$(id -u):$(id -g)") ;; esac # a rootless Docker maps users
  case $security in *name=selinux*) options+=(--security-opt label=disable) ;; esac      # files keep their labels
  trap '"$DOCKER" rm --force "$container" >/dev/null 2>&1 || true' EXIT                  # it ends with this script
  trap 'exit 129' HUP
  trap 'exit 130' INT
  trap 'exit 143' TERM
  found=$("$DOCKER" run --rm --network none --entrypoint python3 "$run" -c "$ask" 2>/dev/null) || found=unknown
fi
[ "$found" = "$version" ] || [ "$found" = unknown ] || fail "trtllm-build is of TensorRT-LLM $found, not $version"

mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)

# build ROLE CHECKPOINT ARTIFACT COMMAND RANKS WORKERS SHM_MIB FLAGS…
build() {
  local role=$1 checkpoint=$2 artifact=$3 shown=$4 ranks=$5 workers=$6 shm=$7
  shift 7
  local folder=$OUT/$role started=$SECONDS
  if [ -f "$folder/SHA256SUMS" ] && grep -qxF "artifact=$artifact" "$folder/facts.txt"; then
    printf '%s is built already\n' "$folder"
    return
  fi
  [ -f "$checkpoint/config.json" ] || fail "no checkpoint in $checkpoint; set ${role^^}_CHECKPOINT"
  checkpoint=$(cd "$checkpoint" && pwd)
  rm -rf "$folder"
  mkdir -p "$folder/engine" "$folder/work"
  local needed free # KiB; an engine holds the weights and little else
  needed=$(($(du -skL "$checkpoint" | cut -f1) * 11 / 10))
  free=$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')
  [ "$free" -ge "$needed" ] || fail "the engine needs about $((needed / 1024)) MiB, $OUT has $((free / 1024)) MiB free; set OUT"
  [ ! -f "$OUT/timing.cache" ] || cp "$OUT/timing.cache" "$folder/work/timing.cache"
  local used
  used=$(IFS=,; printf '%s' "${gpus[*]:0:$workers}")
  if [ -z "$image" ]; then
    (
      cd "$folder/work" &&
        CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=$used PYTHONUNBUFFERED=1 \
          trtllm-build --checkpoint_dir "$checkpoint" --output_dir "$folder/engine" "$@"
    ) \
      2>&1 | tee "$folder/build.log" || fail "trtllm-build failed; its log: $folder/build.log"
  else
    # In the background, so that a signal ends this script, and with it the container, at once. The double quotes keep
    # commas for Docker.
    "$DOCKER" run "${options[@]}" --gpus "\"device=$used\"" --shm-size="${shm}m" --ulimit memlock=-1 --ulimit stack=67108864 \
      --env HOME=/build/work --env USER=builder --env LOGNAME=builder --env PYTHONUNBUFFERED=1 \
      --mount "type=bind,\"source=$checkpoint\",target=/build/checkpoint,readonly" \
      --mount "type=bind,\"source=$folder/engine\",target=/build/engine" \
      --mount "type=bind,\"source=$folder/work\",target=/build/work" \
      "$run" trtllm-build --checkpoint_dir /build/checkpoint --output_dir /build/engine "$@" \
      2>&1 | tee "$folder/build.log" &
    wait $! || fail "trtllm-build failed; its log: $folder/build.log"
  fi
  local rank
  for ((rank = 0; rank < ranks; rank++)); do
    [ -s "$folder/engine/rank$rank.engine" ] || fail "trtllm-build left no rank$rank.engine; its log: $folder/build.log"
  done
  local cache
  for cache in "$folder"/work/*timing.cache; do # the new one of several workers sorts first
    if [ -s "$cache" ]; then cp "$cache" "$OUT/timing.cache" && break; fi
  done
  rm -rf "$folder/work"
  printf '%s\n' "artifact=$artifact" "command=$shown" "version=$version" "host=$(uname -n)" "gpu=$gpu" "driver=$driver" \
    "image=$image" "image_digest=$digest" "seconds=$((SECONDS - started))" >"$folder/facts.txt"
  (cd "$folder" && find . -type f -print0 | sort -z | xargs -0 sha256sum) >"$OUT/.$role.sums"
  mv "$OUT/.$role.sums" "$folder/SHA256SUMS"
}

build target "$TARGET_CHECKPOINT" build-0123456789abcdef0123 \
  'trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --input_timing_cache timing.cache --output_timing_cache timing.cache --workers 1 --max_batch_size 8' \
  1 1 2048 \
  --input_timing_cache timing.cache \
  --output_timing_cache timing.cache \
  --workers 1 \
  --max_batch_size 8

build draft "$DRAFT_CHECKPOINT" build-aa \
  'trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --input_timing_cache timing.cache --output_timing_cache timing.cache --workers 1 --max_batch_size 8 --use_paged_context_fmha enable' \
  1 1 2048 \
  --input_timing_cache timing.cache \
  --output_timing_cache timing.cache \
  --workers 1 \
  --max_batch_size 8 \
  --use_paged_context_fmha enable

printf '%s\n' '' "The engines are in $OUT. Where this script was printed, run:"
printf '  %s %q\n' 'pipeline adopt tiny.yaml build.target' "$OUT/target"
printf '  %s %q\n' 'pipeline adopt tiny.yaml build.draft' "$OUT/draft"
printf '  %s\n' 'pipeline build tiny.yaml'
