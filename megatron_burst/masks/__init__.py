"""What queries see, where it depends on the sample: documents and slices, as kernels need them.

`documents` derives everything from the boundaries of a packed sample, `slices` from the parts of
the score matrix that are computed: `slice_parts` cuts them to a tile, `slice_calls` makes kernel
calls of them, `slice_checks` refuses bad ones. `tree` writes prefix trees as slices. `sample` has
the sample as it is passed, `seen` what is visible by definition. Loaded by the first call that has
documents or slices.
"""
