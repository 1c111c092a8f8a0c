"""Options that commands had, and what says the same now: for a user who types one, and for the page of the manual."""

from __future__ import annotations

# Commands; options; what to write instead, where {key} is the option's name with underscores, {option} the option.
MOVED: tuple[tuple[str, str, str], ...] = (
    (
        "bench, compare, tune",
        "--concurrency --rate --trace --speed --prompts --prompt-tokens --output-tokens --prefix-tokens --prefixes "
        "--turns --think-s --cancel --temperature --requests --seed",
        "--load {key}=VALUE, or that key in a file: --load FILE",
    ),
    ("bench, compare, tune", "--duration --warmup --grace --timeout", "--load {key}_s=SECONDS"),
    ("bench, compare, tune", "--raw", "--load {key}=true"),
    ("bench", "--most", "--sweep with --load concurrency=FIRST,LARGEST"),
    ("bench, compare, tune", "--page", "--output FILE.html"),
    ("tune", "--report", "--output FILE.json"),
    (
        "compare",
        "--rounds --threshold --questions --judge --judge-model --judge-key-env --max-regression --min-passed "
        "--min-equal --min-similar --max-perplexity-increase --max-lost",
        "--criteria {key}=VALUE, or that key in a file: --criteria FILE",
    ),
    ("compare", "--skip-golden --by-turns", "--criteria {key}=true"),
    (
        "tune",
        "--objective --trials --keys --fix --draft-lengths --rounds",
        "--study {key}=VALUE, or that key in a file: --study FILE",
    ),
    ("tune", "--restart", "--study {key}=true"),
    ("bench, doctor", "--schema", "pipeline recipes schema bench, or doctor"),
    ("plan", "--schema", "pipeline recipes schema plan, or comparison"),
    ("plan", "--compare", "pipeline plan compare RECIPE"),
    ("plan", "--gpus --output", "pipeline plan compare RECIPE {option}"),
    ("plan", "--calibrate-from", "pipeline plan calibrate RECIPE BENCH.json…"),
    ("plan", "--accuracy", "pipeline plan accuracy"),
    ("plan", "--gpu", "--set runtime.gpu=NAME"),
    ("plan", "--no-calibration", "--calibration none"),
    ("plan", "--until --allow", "pipeline build RECIPE --dry-run {option}"),
    ("recipes schema", "--check", "pipeline recipes schema | diff FILE -"),
    ("compare, tune, accept", "--gpus", "CUDA_VISIBLE_DEVICES=0,1 in the environment"),
    (
        "cache stats, cache show, cache audit, cache purge, cache export, cache review",
        "--name",
        "ADDRESS#NAME",
    ),
    ("cache show", "--key", "pipeline cache show RECIPE KEY"),
    ("cache purge", "--older-than --tenant --engine --scope --key", "--only {key}=VALUE"),
    ("init", "--dry-run", "--output -"),
    ("logs", "--triton --gateway --supervisor", "pipeline logs NAME {key}"),
    ("rules", "--group --runtime --severity", "the word alone, as pipeline rules error tensorrt"),
    ("store gc", "--dry-run", "--json, which removes nothing without --yes"),
    ("store ls", "--stage --recipe", "the name alone, as pipeline store ls calibrate"),
    ("stream, chat, generate", "--no-cache", "--set cache.enabled=false"),
    ("versions", "--check", "--gpu, a format, or --runtime: with them it checks"),
    ("tune", "--list-keys", "--dry-run"),
    ("accept", "--prompt-tokens --output-tokens --rounds --questions", "--load {key}=VALUE"),
    ("accept", "--start-timeout-s", "--set triton.start_timeout_s=SECONDS"),
    ("stream, chat, generate", "--top-p --top-k --seed --stop", "--param {key}=VALUE"),
    ("stream, generate", "--no-stats", "-q"),
    ("bench, compare, stream, chat, generate", "--api-key", "PIPELINE_API_KEY=KEY in the environment"),
    (
        "serve, gateway",
        "--max-waiting --max-wait-s --idle-timeout-s --workers --max-connections --drain-s --batch-folder "
        "--batch-slots --max-file-mib --max-stored-mib --stored-responses --stored-responses-mib "
        "--stored-responses-s --limits-redis --traces --log-format --log-prompts --spread",
        "--set gateway.{key}=VALUE, or that key in the recipe's section gateway",
    ),
    ("serve, gateway", "--allowed-host --allowed-origin", "--set gateway.{key}s=[VALUE]"),
    ("serve, gateway", "--metric-names", "--set gateway.{key}=[NAME]"),
    (
        "serve, deploy",
        "--address --http-port --grpc-port --metrics-port --image --start-timeout-s --pull-timeout-s "
        "--health-interval-s --hang-timeout-s --max-restarts --restart-window-s --log --memory",
        "--set triton.{key}=VALUE, or that key in the recipe's section triton",
    ),
    ("serve", "--container", "--set triton.container=true"),
    ("serve", "--no-container", "--set triton.container=false"),
    (
        "deploy, monitoring",
        "--port --gateway-image --user --runbook-url",
        "--set deploy.{key}=VALUE, or that key in the recipe's section deploy",
    ),
    (
        "deploy",
        "--namespace --gateways --gpus-per-node --hostname --expose --packages --build-image --storage-class --redis "
        "--prometheus",
        "--set kubernetes.{key}=VALUE, or that key in the recipe's section kubernetes",
    ),
    ("deploy", "--replicas", "--set kubernetes.min_replicas=N --set kubernetes.max_replicas=N"),
    (
        "init, plan, build, adopt, serve, rollout, deploy, tune, accept",
        "--offline",
        "HF_HUB_OFFLINE=1 in the environment",
    ),
)


def moved_to(command: str, option: str) -> str:
    """Return the replacement of an option that a command had; "" if it never had it.

    >>> moved_to("serve", "--allowed-host")
    '--set gateway.allowed_hosts=[VALUE]'
    >>> moved_to("bench", "--warmup")
    '--load warmup_s=SECONDS'
    """
    for commands, options, now in MOVED:
        if command in commands.split(", ") and option in options.split():
            return now.format(key=option.lstrip("-").replace("-", "_"), option=option)
    return ""
