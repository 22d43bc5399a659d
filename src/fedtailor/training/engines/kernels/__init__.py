"""Fast layers for many clients with different weights: convolution, group normalization, and ReLU with max pooling."""
