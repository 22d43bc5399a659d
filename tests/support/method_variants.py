"""Methods with other than the default fields, where these change which code runs."""

import fedtailor as ft
from fedtailor import methods as m
from fedtailor.methods import METHODS

VARIANTS: dict[str, ft.Method] = {
    "fedapa, all shared": m.FedAPA(share="all"),
    "fedapa, code": m.FedAPA(variant="code"),
    "heurfedamp": m.FedAMP(attention="cosine"),
    "apple, one core": m.APPLE(limit=1),
    "apple, two cores": m.APPLE(limit=2),
    "heurpfedla": m.PFedLA(retained=1),
    "pfedla, softmax": m.PFedLA(normalize="softmax"),
    "pfedhn-pc": m.PFedHN(local_head=True),
    "pfedhn, turns": m.PFedHN(turns=True),
    "gpfl, own contexts": m.GPFL(contexts="own"),
    "fedfomo, one model": m.FedFomo(models=1),
    "fedadmm, code": m.FedADMM(variant="code"),
    "selffl, augmented": m.SelfFL(augmented=True, minimum_steps=3),
    "ditto, kept optimizers": m.Ditto(momentum=0.9, keep_optimizer_state=True, weights="uniform"),
    "lag, scaffold": m.LAG(m.Scaffold(), layers="last"),
    "lag, ditto": m.LAG(m.Ditto(), layers="last"),
    "averaged, fedproto": m.Averaged(m.FedProto()),
    "averaged, lag": m.Averaged(m.LAG(m.FedAvg(), layers="last")),
}
ALL_METHODS: dict[str, ft.Method] = {name: kind() for name, kind in METHODS.items()} | VARIANTS
