"""Names of Hugging Face's modules that are made alike, and each tested beside the undivided one (benchmarks/zoo.py)."""

_BARTS = "Bart MBart Blenderbot M2M100 Pegasus Marian Whisper".split()

FEED_FORWARD = [
    *(f"{name}{kind}Layer" for name in _BARTS for kind in ("Encoder", "Decoder")),
    "BioGptDecoderLayer",
    "OPTDecoderLayer",
]
