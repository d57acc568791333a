"""The commands of ``simcse-weince``, a module each, and what their command lines share."""

# Command -> what it does. Each is a module here with a function run(arguments).
COMMANDS = {
    "train": "train a sentence encoder on sentences (or pairs) without labels",
    "evaluate": "score an encoder on STS-Benchmark, the SimCSE suite, or your own graded pairs",
    "encode": "turn a file of sentences into an array of embeddings",
    "search": "how many negatives and which temperature stand for the search you want",
    "diagnose": "ask of an encoder whether the tail of its cosines supports the correction",
    "compare": "lay training runs beside one another",
    "study": "compare losses over seeds, with settings chosen on dev",
    "vision-train": "train an image encoder without labels",
    "vision-eval": "score a frozen image encoder by linear probes and nearest neighbours",
}
