// Project points to two dimensions from the cosine similarities of their vectors.

// Return the eigenvalues and eigenvectors (columns) of a symmetric matrix, with Jacobi rotations.
function eigen(symmetric) {
  const size = symmetric.length;
  const a = symmetric.map((row) => [...row]);
  const vectors = a.map((_, row) => a.map((__, column) => (row === column ? 1 : 0)));
  for (let sweep = 0; sweep < 50; sweep += 1) {
    let offDiagonal = 0;
    for (let p = 0; p < size; p += 1) {
      for (let q = p + 1; q < size; q += 1) offDiagonal += a[p][q] ** 2;
    }
    if (offDiagonal < 1e-18) break;
    for (let p = 0; p < size; p += 1) {
      for (let q = p + 1; q < size; q += 1) {
        if (Math.abs(a[p][q]) > 1e-15) rotate(a, vectors, p, q);
      }
    }
  }
  return { values: a.map((row, index) => row[index]), vectors };
}

// Set a[p][q] to zero by a rotation in the plane of p and q.
function rotate(a, vectors, p, q) {
  const theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
  const tangent = Math.sign(theta || 1) / (Math.abs(theta) + Math.hypot(theta, 1));
  const cosine = 1 / Math.hypot(tangent, 1);
  const sine = tangent * cosine;
  const turn = (row, first, second) => {
    const [x, y] = [row[first], row[second]];
    row[first] = cosine * x - sine * y;
    row[second] = sine * x + cosine * y;
  };
  for (const row of a) turn(row, p, q);
  for (let k = 0; k < a.length; k += 1) {
    const [x, y] = [a[p][k], a[q][k]];
    a[p][k] = cosine * x - sine * y;
    a[q][k] = sine * x + cosine * y;
  }
  for (const row of vectors) turn(row, p, q);
}

// The first two principal components of unit vectors, from their similarities [n][n].
// Return {points: [n][2], share: share of the variance}.
export function project(similarities) {
  const size = similarities.length;
  const means = similarities.map((row) => row.reduce((sum, value) => sum + value, 0) / size);
  const mean = means.reduce((sum, value) => sum + value, 0) / size;
  const centered = similarities.map((row, i) => row.map((value, j) => value - means[i] - means[j] + mean));
  const total = centered.reduce((sum, row, index) => sum + row[index], 0);
  // Identical vectors have no directions; for example, embeddings without positions.
  if (total < 1e-6) return { points: centered.map(() => [0, 0]), share: 1 };
  const { values, vectors } = eigen(centered);
  const order = values.map((_, index) => index).sort((one, other) => values[other] - values[one]);
  const scales = [order[0], order[1]].map((index) => Math.sqrt(Math.max(values[index] ?? 0, 0)));
  const points = vectors.map((row) => scales.map((scale, k) => scale * (row[order[k]] ?? 0)));
  const share = (scales[0] ** 2 + scales[1] ** 2) / total;
  return { points, share: Math.min(share, 1) };
}

// Rotate or mirror points to be closest to a target (orthogonal Procrustes problem).
export function align(points, target) {
  const m = [[0, 0], [0, 0]];
  points.forEach((point, index) => {
    for (const i of [0, 1]) for (const j of [0, 1]) m[i][j] += point[i] * target[index][j];
  });
  const rotation = [m[0][0] + m[1][1], m[0][1] - m[1][0]];
  const reflection = [m[0][0] - m[1][1], m[0][1] + m[1][0]];
  const isRotation = Math.hypot(...rotation) >= Math.hypot(...reflection);
  const [x, y] = isRotation ? rotation : reflection;
  const norm = Math.hypot(x, y) || 1;
  const [cosine, sine] = norm === 1 && x === 0 && y === 0 ? [1, 0] : [x / norm, y / norm];
  const sign = isRotation ? 1 : -1;
  return points.map(([px, py]) => [cosine * px - sign * sine * py, sine * px + sign * cosine * py]);
}
