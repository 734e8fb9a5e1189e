"""What the report of an analysis says under its figures."""

RANK = """Each image's matrix in each head: mean, shaded one standard deviation over images and heads. KV state: Σ_j
α_j Rκ(k_j) ⊗ v_j, head width × head width, what every query reads (softmax attention has none). The others are tokens
× head width, class token left out: the operator's output, then with the local term added, then times the gate, as far
as the layer has them. Singular values in float64 of float32 activations. The papers name no tolerance, and the result
depends on it, so several are shown; the first is max(rows, columns) · 1.2·10⁻⁷ of the largest singular value."""
SPECTRUM = """Singular values over the largest of the same matrices, mean over images and heads. A fast fall means low
rank; where a curve crosses the dotted lines is its rank at 10⁻² and 10⁻³."""
SCORE_MAPS = """One query's row of the score matrix over the image, mean over heads; class token left out. Red
positive, blue negative, the colour fades to the grey image at zero, each map on its own scale: an evenly red map
attends to everything alike."""
SCORES = """Over the rows of the matrix (512 evenly chosen ones where there are more), class token included; dots
mean, bars one standard deviation over images and heads. Entropy is that of |A|/Σ|A|, because a row with negative
entries is not a distribution; 1 is a row that attends to all tokens alike. Where the mechanism rotates queries and keys
only in the numerator, rows need not sum to one, and entries can turn negative by the rotation alone: hollow dots leave
it out."""
READOUTS = """Queries and keys of {layer}, without rotation, under four mechanisms: softmax, plain linear attention,
MALA as released (similarity times 1/(N·√width)) and MALA as its paper writes it (without that factor). Upper row: each
query's scores from the largest to the smallest when κ(q), or q for softmax, is a times as large; mean over 64 queries
per image and the heads. Exactly true: linear attention does not change with a; MALA's scores are affine in a;
softmax's ratio p grows as a power, p^a. MALA's p saturates at (σ_m - mean)/(σ_n - mean), and keys below the mean
similarity turn negative."""
MAGNITUDE = """Every layer with its own mechanism, rotation and feature map, its queries a times as large and its
token weights as they were; deeper layers are darker. p: median over queries of the best key's score over that of the
key at the upper quartile; queries whose two keys are not both positive at every a are left out, and a layer without
any has no line. An attention with queries of unit norm is scaled after they got it."""
