"""Every claim, by its name, in the order of the pages."""

from __future__ import annotations

from rkfac_lab.claims.claim import Claim
from rkfac_lab.claims.complexity import Complexity
from rkfac_lab.claims.fewer_epochs import FewerEpochs
from rkfac_lab.claims.modes import Modes
from rkfac_lab.claims.rank import Rank
from rkfac_lab.claims.sketches import Sketches
from rkfac_lab.claims.spectra import Spectra
from rkfac_lab.claims.table_one import TableOne

CLAIMS: dict[str, Claim] = {
    claim.name: claim for claim in (FewerEpochs(), Sketches(), Spectra(), Modes(), Rank(), TableOne(), Complexity())
}
