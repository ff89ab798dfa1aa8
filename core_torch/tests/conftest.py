"""One thread: the machine's cores belong to the ranks that other tests start."""

import torch

torch.set_num_threads(1)
