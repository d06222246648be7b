"""A plant's demands of how much attacks may tell of its images."""

from collections.abc import Callable

from msgspec import UNSET, UnsetType

from broker_config.protocol.messages import Spec
from edge_node.extensions.audit.exposure import MEANINGS, Share, What
from trainer import progress
from trainer.data.class_folders import Images
from trainer.federation.client.plant_checks import PlantCheck
from trainer.models.named_tensors import Arrays


class ExposureCheck(PlantCheck, frozen=True):
    """How much attacks may tell at most, of all there is to tell: an audit comes first."""

    remedy = "write 0 for nothing to 1 for all, for example --demand pictures=0.2"
    passed_file = "audited.json"

    counts: Share | UnsetType = UNSET
    membership: Share | UnsetType = UNSET
    pictures: Share | UnsetType = UNSET

    @property
    def shares(self) -> dict[What, float]:
        """The share of what there is to tell that attacks may tell, where the plant says so."""
        return {what: self.demanded[what] for what in MEANINGS if what in self.demanded}

    def check_images(
        self,
        spec: Spec,
        images: Images,
        report: progress.Report,
        stop: Callable[[], bool],
    ) -> None:
        """Audit the federation before the plant joins, with the weights that it must expect."""
        from edge_node.extensions.audit import federation_audit  # noqa: PLC0415  (imports torch)

        federation_audit.check_exposure(spec, images, self.shares, report, stop)

    def digest_basis(self, spec: Spec) -> str:
        """Return the digest of the first broadcast that the audit is made with."""
        from edge_node.extensions.audit import federation_audit  # noqa: PLC0415  (imports torch)

        return federation_audit.digest_first(spec)

    def check_begin(
        self,
        spec: Spec,
        images: Images,
        broadcast: Arrays,
        round_: int,
        stop: Callable[[], bool],
        *,
        is_newcomer: bool,
    ) -> None:
        """Audit once more if the round begins with other tensors than the audit did."""
        from edge_node.extensions.audit import federation_audit  # noqa: PLC0415  (imports torch)

        federation_audit.check_begin(
            spec, images, self.shares, broadcast, round_, stop, is_newcomer=is_newcomer
        )
