"""Who runs trtllm-build: this machine, a container on it, or another machine.

executor_of(order.executor).run(BuildJob(…), order.progress)   # -> BuildLog, and the files in job.output
"""

from pipeline.runtimes.tensorrt.executors.base import BuildLog, Executor
from pipeline.runtimes.tensorrt.executors.choice import executor_of
from pipeline.runtimes.tensorrt.executors.job import BuildJob, timing_cache_file

__all__ = ["BuildJob", "BuildLog", "Executor", "executor_of", "timing_cache_file"]
