"""Fast layers for many clients with different weights: convolution, and ReLU with max pooling."""
