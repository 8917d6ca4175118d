"""Every verb of the command line: importing this registers them.

It never knows what a verb does.
"""

from bertsmith.cli import pretrain as pretrain
from bertsmith.cli import corpus as corpus
from bertsmith.cli import prepare as prepare
from bertsmith.cli import vocab as vocab
from bertsmith.cli import fill as fill
from bertsmith.cli import pair as pair
from bertsmith.cli import score as score
