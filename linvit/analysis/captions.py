"""The captions of the figures in the report of an analysis."""

RANK = """Each line is the mean over images and heads, shaded by one standard deviation. KV state: the matrix Σ_j α_j
Rκ(k_j) ⊗ v_j that all queries read, head width × head width (softmax attention has none). The other matrices are tokens
× head width, without the class token: the operator's output, then with the local term, then times the gate, if
the layer has them. Singular values are computed in float64 from float32 activations. The papers do not state a
tolerance, and the rank depends on it, so several are shown; the first is max(rows, columns) · 1.2·10⁻⁷ of the largest
singular value."""
SPECTRUM = """Singular values of the same matrices relative to the largest one, mean over images and heads. A steep
curve means low rank; the rank at 10⁻² or 10⁻³ is where the curve crosses the dotted line."""
SCORE_MAPS = """The scores of one query (the dot) over the image, mean over heads, without the class token. Red is
positive, blue is negative, and zero shows the grey image. Each map has its own scale: an evenly red map attends to all
tokens equally."""
SCORES = """Measures of the rows of the score matrix A (at most 512, evenly chosen), class token included. Dots are
means, bars one standard deviation over images and heads. The entropy is that of |A|/Σ|A|, because a row with negative
entries is not a distribution; 1 means that all tokens count equally. If a mechanism rotates queries and keys only in
the numerator, rows need not sum to one, and the rotation alone can make entries negative: hollow dots are without
it."""
READOUTS = """Queries and keys of {layer}, without rotation, under four mechanisms: softmax, vanilla linear attention,
MALA as released (similarity times 1/(N·√width)) and MALA as in the paper (without that factor). The upper four panels
show each query's scores from the largest to the smallest after κ(q) (for softmax, q) is multiplied by a; mean over 64
queries per image and all heads. These relations are exact: linear attention does not depend on a; MALA's scores are
affine in a; softmax's ratio p becomes p^a. MALA's p saturates at (σ_m - mean)/(σ_n - mean), and keys below the mean
similarity get negative scores."""
MAGNITUDE = """Every layer with its own mechanism, rotation and feature map. Its queries are multiplied by a, its token
weights are not changed; deeper layers are darker. p is the score of the best key over that of the key at the upper
quartile, median over queries. Queries for which one of the two is not positive at every a are left out, and so are
layers without any other query. In attention with unit-norm queries, the queries are multiplied after they are
normalized."""
