"""What the notebooks share: `Workshop` for text-to-SQL (00 to 06), `CausalWorkshop` for causal models (11 to 14)."""

from zeropods.workshop.causal import CausalWorkshop
from zeropods.workshop.settings import ROOT
from zeropods.workshop.text2sql import EMBEDDED, TINY, TRAINING, Workshop

__all__ = ["EMBEDDED", "ROOT", "TINY", "TRAINING", "CausalWorkshop", "Workshop"]
