"""The definition of an experiment: its question, its stages and its report."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bertsmith.lab.report import Report
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import StageFunction
from bertsmith.lab.stages import StageFactory

#: The stages whose results an experiment reports, by a key that says what they measure.
Stages = dict[Any, Stage]
#: The results of those stages under the same keys, None where a result is missing.
Results = Mapping[Hashable, dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment of the paper, or a related one.

    Attributes:
        name: The name on the command line.
        source: The section, table or figure of the paper.
        question: The question that the experiment answers.
        build_stages: Returns the stages to run.
        build_report: Returns tables and plots from the results.
        stage_functions: Runs the kinds of stages that only this experiment has.
    """

    name: str
    source: str
    question: str
    build_stages: Callable[[StageFactory], Stages]
    build_report: Callable[[StageFactory, Results], Report]
    stage_functions: Mapping[str, StageFunction] = field(default_factory=dict)
