"""The definition of an experiment: its question, its stages and its report."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bertsmith.lab.report import Report
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import StageFunction
from bertsmith.lab.stages import StageFactory

#: The stages whose results an experiment reports. A key identifies the configuration and what is
#: measured, such as ("relu", 0) for an activation and a seed.
Stages = dict[Any, Stage]
#: The results of these stages under the same keys, None for missing results.
Results = Mapping[Hashable, dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment of the paper, or a related one.

    Attributes:
        name: The name on the command line.
        source: The section, table or figure of the paper.
        question: The question that the experiment answers.
        build_stages: Function that returns the stages whose results are reported.
        build_report: Function that returns tables and plots of the results.
        stage_functions: Functions that run the kinds of stages that only this experiment has.
    """

    name: str
    source: str
    question: str
    build_stages: Callable[[StageFactory], Stages]
    build_report: Callable[[StageFactory, Results], Report]
    stage_functions: Mapping[str, StageFunction] = field(default_factory=dict)
