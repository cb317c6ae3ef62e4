"""`coppice bench ablation`: what each drafter, each shape of tree and each way to choose children is worth."""
