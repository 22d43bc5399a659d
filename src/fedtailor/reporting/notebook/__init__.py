"""What notebooks show for federations, runs, methods, and models: HTML with inline SVG and without JavaScript."""
