"""Names of Hugging Face's modules that are made alike, and each tested beside the undivided one (benchmarks/zoo.py)."""

_BERTS = "Bert Roberta Camembert XLMRoberta Electra LayoutLM".split()
_BARTS = "Bart MBart Blenderbot M2M100 Pegasus Marian Whisper".split()

BERT_ATTENTION = [f"{name}Attention" for name in _BERTS]
FEED_FORWARD = [
    *(f"{name}Layer" for name in _BERTS),
    *(f"{name}{kind}Layer" for name in _BARTS for kind in ("Encoder", "Decoder")),
    "OPTDecoderLayer",
]
