"""Who runs trtllm-build: this machine, a container on it, or another machine.

executor_of(inputs.executor).run(BuildJob(…), inputs.progress)   # -> BuildLog, and the files in job.output
"""

from pipeline.runtimes.tensorrt.executors.base import BuildJob, BuildLog, Executor, timing_cache_file
from pipeline.runtimes.tensorrt.executors.choice import executor_of

__all__ = ["BuildJob", "BuildLog", "Executor", "executor_of", "timing_cache_file"]
