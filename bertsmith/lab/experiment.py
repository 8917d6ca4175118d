"""What an experiment is: its question, the stages that answer it, and how the answer is told.

It never makes a stage.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bertsmith.lab.report import Report
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import StageFunction
from bertsmith.lab.stages import StageFactory

#: The stages of an experiment by what they answer; results under the same keys, None if missing.
Stages = dict[Any, Stage]
Results = Mapping[Hashable, dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of the paper's, or of those who read it. ``source``: where in the paper it stands.

    stage_functions: how kinds of stages that it alone has are made.
    """

    name: str
    source: str
    question: str
    build_stages: Callable[[StageFactory], Stages]
    build_report: Callable[[StageFactory, Results], Report]
    stage_functions: Mapping[str, StageFunction] = field(default_factory=dict)
