/* Moments in fewer bits than a float's: decoded to floats a block at a time, and encoded again.
 *
 * Included by kernels_impl.h for each instruction set. Everything is integer arithmetic on the bits
 * of floats and single IEEE operations, so every instruction set gives the same bits.
 *
 * Rounding is stochastic: up with the probability that makes the expected value exact, or a moment
 * that changes by less than half a step would never change. The random bits are a function of
 * (parameter, element, step) alone, so they depend on nothing else: not on where a value lives, how
 * it is cut, nor which thread comes first.
 *
 * 8-bit moments follow Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv
 * 2110.02861): blocks that share a scale, their largest magnitude, and codes whose steps grow with
 * the value. Departures: the code is a small floating-point format instead of the table of dynamic
 * tree quantization, which it resembles, so that coding is arithmetic; rounding is stochastic; and
 * an exp_avg_sq that is not zero never becomes zero, because dividing by its root would make a step
 * without bounds of what is left in exp_avg.
 *
 *   exp_avg:    sign, 4 bits of exponent, 3 of mantissa: 127 values from 2^-16 * 1.25 to 1
 *   exp_avg_sq: 5 bits of exponent, 3 of mantissa:       255 values from 2^-32 * 1.25 to 1
 *
 * Code 0 is zero. Code c > 0 stands for the float with the bits (c + bias) << 20; 1.0 is the last.
 * Example: 1.0 has the bits 0x3f800000 = 1016 << 20, so the bias is 1016 - 127 or 1016 - 255.
 */
#define SIGNED_BIAS (1016u - 127u)
#define UNSIGNED_BIAS (1016u - 255u)
#define CODE_SHIFT 20

/* Blocks are decoded as wholes; the others in pieces of the same length. */
#define PIECE SWAP_MOMENT_BLOCK

typedef uint8_t bytes __attribute__((vector_size(WIDTH)));

/* Random bits for elements [index, index + WIDTH) of one parameter in one step; `high` are the
 * bits of the indices above 32, mixed with parameter and step. The constants are those of Chris
 * Wellons' hash prospector for this shape, with a second word of the key between the rounds. */
INLINE words random_bits(uint64_t key, uint32_t index) {
    static const uint32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    words x;
    memcpy(&x, lanes, sizeof x);
    x += index;
    x += (uint32_t)key;
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x ^= x >> 15;
    x += (uint32_t)(key >> 32);
    x *= 0xd35a2d97u;
    x ^= x >> 15;
    return x;
}

/* SplitMix64's mixing of a counter. */
INLINE uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

INLINE floats small_floats(words x) { return __builtin_convertvector(x, floats); }

INLINE words load_codes(const uint8_t *from) {
    bytes codes;
    memcpy(&codes, from, sizeof codes);
    return __builtin_convertvector(codes, words);
}

INLINE void store_codes(words codes, uint8_t *to) {
    bytes narrow_codes = __builtin_convertvector(codes, bytes);
    memcpy(to, &narrow_codes, sizeof narrow_codes);
}

/* x is finite, infinite, or the NaN of one_nan: none of them is another kind of number after it.
 * Between the last finite bf16 and infinity nothing is rounded up. */
INLINE void store_bf16_randomly(floats x, words random16, uint16_t *to) {
    words bits = (words)x;
    words is_last = (words)(((bits >> 16) & 0x7fffu) == 0x7f7fu);
    narrow((bits + (random16 & ~is_last)) >> 16, to);
}

INLINE floats decode(words magnitude, uint32_t bias) {
    words is_code = (words)(magnitude != 0u);
    return (floats)(((magnitude + bias) << CODE_SHIFT) & is_code);
}

/* The codes of y in [0, 1], rounded by 16 random bits. */
INLINE words encode(floats y, words random16, uint32_t bias, bool never_zero) {
    const floats zero = {0.0f};
    const uint32_t least_bits = (bias + 1u) << CODE_SHIFT;
    words bits = (words)y;
    words code = ((bits + (random16 << (CODE_SHIFT - 16))) >> CODE_SHIFT) - bias;
    words is_below = (words)((bits >> CODE_SHIFT) < bias + 1u);
    words least;
    if (never_zero) {
        least = (words)(y > zero) & 1u;
    } else {
        float unit; /* of the probability that the least code is taken */
        memcpy(&unit, &least_bits, sizeof unit);
        unit *= 0x1p-16f;
        least = (words)(y > small_floats(random16) * unit) & 1u;
    }
    return (is_below & least) | (~is_below & code);
}

/* The largest magnitude, or the NaN of one_nan if any value is not finite. Magnitudes are ordered
 * as the bits are. `n` is a multiple of LINE. */
INLINE float scale_of(const float *values, int n) {
    typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
    ints most = {0};
    for (int i = 0; i < n; i += WIDTH) {
        ints magnitude = (ints)((words)load(values + i) & 0x7fffffffu);
        ints greater = magnitude > most;
        most = (greater & magnitude) | (~greater & most);
    }
    int32_t largest = 0;
    for (int lane = 0; lane < WIDTH; lane++)
        largest = most[lane] > largest ? most[lane] : largest;
    if (largest >= 0x7f800000)
        largest = 0x7fc00000;
    float scale;
    memcpy(&scale, &largest, sizeof scale);
    return scale;
}

INLINE void decode_bf16(const uint16_t *codes, float *values, int n) {
    for (int i = 0; i < n; i += WIDTH)
        store(load_bf16(codes + i), values + i);
}

static void decode_signed(const uint8_t *codes, float scale, float *values, int n) {
    for (int i = 0; i < n; i += WIDTH) {
        words code = load_codes(codes + i);
        floats x = decode(code & 0x7fu, SIGNED_BIAS) * scale;
        store((floats)((words)x | (code >> 7) << 31), values + i);
    }
}

static void decode_unsigned(const uint8_t *codes, float scale, float *values, int n) {
    for (int i = 0; i < n; i += WIDTH)
        store(decode(load_codes(codes + i), UNSIGNED_BIAS) * scale, values + i);
}

/* Where there is nothing but zeros, or no number, whatever is stored decodes to that. */
INLINE float divisor(float scale) { return scale > 0.0f ? scale : 1.0f; }

static float encode_signed(const float *values, uint64_t key, uint32_t index, uint8_t *codes,
                           int n) {
    const float scale = scale_of(values, n), by = divisor(scale);
    for (int i = 0; i < n; i += WIDTH) {
        words bits = (words)load(values + i);
        words random16 = random_bits(key, index + (uint32_t)i) & 0xffffu;
        floats y = (floats)(bits & 0x7fffffffu) / by;
        words code = encode(y, random16, SIGNED_BIAS, false) & 0x7fu;
        store_codes(code | (bits >> 31) << 7, codes + i);
    }
    return scale;
}

static float encode_unsigned(const float *values, uint64_t key, uint32_t index, uint8_t *codes,
                             int n) {
    const float scale = scale_of(values, n), by = divisor(scale);
    for (int i = 0; i < n; i += WIDTH) {
        words random16 = random_bits(key, index + (uint32_t)i) >> 16;
        floats y = (floats)((words)load(values + i) & 0x7fffffffu) / by;
        store_codes(encode(y, random16, UNSIGNED_BIAS, true) & 0xffu, codes + i);
    }
    return scale;
}

static void encode_bf16(const float *exp_avg, const float *exp_avg_sq, uint64_t key, uint32_t index,
                        uint16_t *m, uint16_t *v, int n) {
    for (int i = 0; i < n; i += WIDTH) {
        words random = random_bits(key, index + (uint32_t)i);
        store_bf16_randomly(load(exp_avg + i), random & 0xffffu, m + i);
        store_bf16_randomly(load(exp_avg_sq + i), random >> 16, v + i);
    }
}

union codes {
    uint16_t narrow[PIECE];
    uint8_t bytes[PIECE];
};

/* Updates elements [at, at + n) of a job, at most PIECE of them and one block where moments come
 * in blocks. */
static void adam_piece(const struct swap_adam *job, const struct swap_adam *old, int64_t at,
                       int n) {
    const bool in_bytes = job->moments == SWAP_MOMENTS_U8;
    const size_t size = in_bytes ? 1 : 2, count = (size_t)n * size;
    const int padded = (n + LINE - 1) / LINE * LINE;
    const int64_t block = at / SWAP_MOMENT_BLOCK;
    union codes m, v;
    float exp_avg[PIECE], exp_avg_sq[PIECE];

    memset((char *)&m + count, 0, (size_t)padded * size - count);
    memset((char *)&v + count, 0, (size_t)padded * size - count);
    memcpy(&m, (const char *)old->exp_avg + (size_t)at * size, count);
    memcpy(&v, (const char *)old->exp_avg_sq + (size_t)at * size, count);
    if (in_bytes) {
        decode_signed(m.bytes, old->exp_avg_scale[block], exp_avg, padded);
        decode_unsigned(v.bytes, old->exp_avg_sq_scale[block], exp_avg_sq, padded);
    } else {
        decode_bf16(m.narrow, exp_avg, padded);
        decode_bf16(v.narrow, exp_avg_sq, padded);
    }
    const size_t weight_at = (size_t)at * (job->layout == SWAP_MASTER_ONLY ? 4 : 2);
    const size_t rest_at = (size_t)at * (job->layout == SWAP_HALVES ? 2 : 4);
    struct swap_adam own = *job;
    own.moments = SWAP_MOMENTS_F32;
    own.weight = (char *)job->weight + weight_at;
    own.rest = job->rest ? (char *)job->rest + rest_at : NULL;
    own.grad = (const char *)job->grad + (size_t)at * (job->grad_float == SWAP_F32 ? 4 : 2);
    own.exp_avg = exp_avg;
    own.exp_avg_sq = exp_avg_sq;
    struct swap_adam from = own;
    from.weight = (char *)old->weight + weight_at;
    from.rest = old->rest ? (char *)old->rest + rest_at : NULL;
    adam_floats(&own, &from, 0, n);
    /* What is beyond the last element is no element's, and must not count for a scale. */
    for (int i = n; i < padded; i++)
        exp_avg[i] = exp_avg_sq[i] = 0.0f;

    const uint64_t index = (uint64_t)(job->first + at);
    const uint64_t key = mix(mix(mix(job->parameter) + job->step) + (index >> 32));
    if (in_bytes) {
        job->exp_avg_scale[block] = encode_signed(exp_avg, key, (uint32_t)index, m.bytes, padded);
        job->exp_avg_sq_scale[block] =
            encode_unsigned(exp_avg_sq, key, (uint32_t)index, v.bytes, padded);
    } else {
        encode_bf16(exp_avg, exp_avg_sq, key, (uint32_t)index, m.narrow, v.narrow, padded);
    }
    memcpy((char *)job->exp_avg + (size_t)at * size, &m, count);
    memcpy((char *)job->exp_avg_sq + (size_t)at * size, &v, count);
}

static void adam_range(const struct swap_adam *job, const struct swap_adam *old, int64_t begin,
                       int64_t end) {
    if (job->moments == SWAP_MOMENTS_F32) {
        adam_floats(job, old, begin, end);
        return;
    }
    for (int64_t at = begin; at < end;) {
        int64_t n = end - at < PIECE ? end - at : PIECE;
        /* Indices of one piece share their upper 32 bits. */
        int64_t left = 0x100000000 - ((job->first + at) & 0xffffffff);
        n = n < left ? n : left;
        adam_piece(job, old, at, (int)n);
        at += n;
    }
}
