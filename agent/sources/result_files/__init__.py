"""Result files of load generators: `vllm bench serve`, AIPerf and GuideLLM."""

from agent.sources.result_files.benched import BenchedFigures, BenchedRun, ResultFileInvalid
from agent.sources.result_files.reading import read_result_file

__all__ = [
    "BenchedFigures",
    "BenchedRun",
    "ResultFileInvalid",
    "read_result_file",
]
