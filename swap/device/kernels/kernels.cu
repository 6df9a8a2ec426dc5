/* One step of Adam, and sums of squares, on a CUDA device in one pass over memory: the bits of the
 * C kernels.
 *
 * Compiled at run time, without headers. The formulas are those of csrc/kernels_impl.h and
 * csrc/moments_impl.h, which say why they are as they are. Each operation is an intrinsic that
 * rounds once, to nearest, and that no option of the compiler contracts or replaces.
 *
 * In a step a block of threads has an element each, SWAP_MOMENT_BLOCK of them: those that share the
 * scales of 8-bit moments. It goes on with the block that lies as many further as there are in the
 * grid; so do those that add squares.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define BLOCK 256
#define DEVICE static __device__ __forceinline__

enum { F32, BF16, F16 };                           /* enum swap_float */
enum { HALVES, COPY_BF16, COPY_F16, MASTER_ONLY }; /* enum swap_layout */
enum { DECAY_WEIGHT, DECAY_GRADIENT };             /* enum swap_decay */
enum { MOMENTS_F32, MOMENTS_BF16, MOMENTS_U8 };    /* enum swap_moments */

/* struct swap_adam of csrc/kernels.h, field by field. */
struct adam_job {
    void *weight;
    void *rest;
    void *exp_avg;
    void *exp_avg_sq;
    float *exp_avg_scale;
    float *exp_avg_sq_scale;
    const void *grad;
    i64 n;
    int layout;
    int grad_float;
    int decay_mode;
    int moments;
    u64 parameter;
    u64 step;
    i64 first;
    float decay;
    float grad_scale;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float bias2_sqrt;
    float eps;
    float minus_step_size;
};

/* Moments of one element as floats. */
struct moments {
    float m;
    float v;
};

DEVICE float one_nan(float x) { return x != x ? __uint_as_float(0x7fc00000u) : x; }

/* Floats of 16 bits. */

DEVICE float widen_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

DEVICE u16 narrow_bf16(float x) {
    u32 bits = __float_as_uint(x);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

DEVICE float widen_f16(u16 half) {
    u32 magnitude = (u32)(half & 0x7fffu) << 13;
    float rebased = __fmul_rn(__uint_as_float(magnitude), 5192296858534827628530496329220096.0f);
    u32 bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : __float_as_uint(rebased);
    return __uint_as_float(bits | (u32)(half & 0x8000u) << 16);
}

DEVICE u16 narrow_f16(float x) {
    u32 bits = __float_as_uint(x);
    u32 magnitude = bits & 0x7fffffffu;
    u32 normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    u32 tiny = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u;
    u32 half = magnitude < 0x38800000u ? tiny : normal;
    half = magnitude >= 0x47800000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (u16)(half | (bits >> 16 & 0x8000u));
}

/* Weights and gradients. */

DEVICE float load_master(const struct adam_job *job, i64 i) {
    if (job->layout == MASTER_ONLY)
        return ((const float *)job->weight)[i];
    if (job->layout != HALVES)
        return ((const float *)job->rest)[i];
    u32 high = (u32)((const u16 *)job->weight)[i] << 16;
    return __uint_as_float(high + (u32)(int)((const short *)job->rest)[i]);
}

DEVICE void store_master(const struct adam_job *job, i64 i, float p) {
    if (job->layout == MASTER_ONLY) {
        ((float *)job->weight)[i] = p;
    } else if (job->layout == HALVES) {
        u32 bits = __float_as_uint(p);
        ((u16 *)job->weight)[i] = (u16)((bits + 0x8000u) >> 16);
        ((u16 *)job->rest)[i] = (u16)bits;
    } else {
        ((float *)job->rest)[i] = p;
        ((u16 *)job->weight)[i] = job->layout == COPY_BF16 ? narrow_bf16(p) : narrow_f16(p);
    }
}

DEVICE float load_as(int kind, const void *values, i64 i) {
    if (kind == F32)
        return ((const float *)values)[i];
    u16 bits = ((const u16 *)values)[i];
    return kind == BF16 ? widen_bf16(bits) : widen_f16(bits);
}

/* Moments of 8 bits. */

#define SIGNED_BIAS (1016u - 127u)
#define UNSIGNED_BIAS (1016u - 255u)
#define CODE_SHIFT 20

DEVICE float decode(u32 magnitude, u32 bias) {
    return __uint_as_float(magnitude ? (magnitude + bias) << CODE_SHIFT : 0u);
}

DEVICE u32 encode(float y, u32 random16, u32 bias, int is_signed) {
    u32 bits = __float_as_uint(y);
    if ((bits >> CODE_SHIFT) >= bias + 1u)
        return ((bits + (random16 << (CODE_SHIFT - 16))) >> CODE_SHIFT) - bias;
    if (!is_signed)
        return y > 0.0f;
    float unit = __fmul_rn(__uint_as_float((bias + 1u) << CODE_SHIFT), 0.0000152587890625f);
    return y > __fmul_rn((float)random16, unit);
}

DEVICE float divisor(float scale) { return scale > 0.0f ? scale : 1.0f; }

DEVICE float scale_of(u32 largest) {
    return __uint_as_float(largest >= 0x7f800000u ? 0x7fc00000u : largest);
}

/* The magnitude of x as a part of the largest in its block. */
DEVICE float part_of(float x, float scale) {
    return one_nan(__fdiv_rn(__uint_as_float(__float_as_uint(x) & 0x7fffffffu), divisor(scale)));
}

DEVICE u64 mix(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

DEVICE u32 random_bits(const struct adam_job *job, i64 i) {
    u64 index = (u64)(job->first + i);
    u64 key = mix(mix(mix(job->parameter) + job->step) + (index >> 32));
    u32 x = (u32)index + (u32)key;
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x ^= x >> 15;
    x += (u32)(key >> 32);
    x *= 0xd35a2d97u;
    x ^= x >> 15;
    return x;
}

DEVICE u16 narrow_randomly(float x, u32 random16) {
    u32 bits = __float_as_uint(x);
    return (u16)((bits + (((bits >> 16) & 0x7fffu) == 0x7f7fu ? 0u : random16)) >> 16);
}

/* Any kind of moments. */

DEVICE struct moments load_moments(const struct adam_job *job, i64 i) {
    struct moments at;
    if (job->moments == MOMENTS_F32) {
        at.m = ((const float *)job->exp_avg)[i];
        at.v = ((const float *)job->exp_avg_sq)[i];
    } else if (job->moments == MOMENTS_BF16) {
        at.m = widen_bf16(((const u16 *)job->exp_avg)[i]);
        at.v = widen_bf16(((const u16 *)job->exp_avg_sq)[i]);
    } else {
        u32 code = ((const u8 *)job->exp_avg)[i];
        float m = __fmul_rn(decode(code & 0x7fu, SIGNED_BIAS), job->exp_avg_scale[i / BLOCK]);
        at.m = __uint_as_float(__float_as_uint(m) | (code >> 7) << 31);
        u32 root = ((const u8 *)job->exp_avg_sq)[i];
        at.v = __fmul_rn(decode(root, UNSIGNED_BIAS), job->exp_avg_sq_scale[i / BLOCK]);
    }
    return at;
}

DEVICE void store_floats(const struct adam_job *job, i64 i, struct moments at) {
    if (job->moments == MOMENTS_F32) {
        ((float *)job->exp_avg)[i] = at.m;
        ((float *)job->exp_avg_sq)[i] = at.v;
        return;
    }
    u32 random = random_bits(job, i);
    ((u16 *)job->exp_avg)[i] = narrow_randomly(at.m, random & 0xffffu);
    ((u16 *)job->exp_avg_sq)[i] = narrow_randomly(at.v, random >> 16);
}

/* All threads of a block come here, those without an element with zeros, and after those have read
 * the scales of before. */
DEVICE void store_codes(const struct adam_job *job, i64 i, struct moments at) {
    __shared__ u32 largest_m, largest_v;
    if (threadIdx.x == 0)
        largest_m = largest_v = 0u;
    __syncthreads();
    atomicMax(&largest_m, __float_as_uint(at.m) & 0x7fffffffu);
    atomicMax(&largest_v, __float_as_uint(at.v) & 0x7fffffffu);
    __syncthreads();
    float scale_m = scale_of(largest_m), scale_v = scale_of(largest_v);
    __syncthreads(); /* before the next block begins with zeros again */
    if (i >= job->n)
        return;
    if (threadIdx.x == 0) {
        job->exp_avg_scale[i / BLOCK] = scale_m;
        job->exp_avg_sq_scale[i / BLOCK] = scale_v;
    }
    u32 random = random_bits(job, i);
    u32 code = encode(part_of(at.m, scale_m), random & 0xffffu, SIGNED_BIAS, 1) & 0x7fu;
    ((u8 *)job->exp_avg)[i] = (u8)(code | (__float_as_uint(at.m) >> 31) << 7);
    ((u8 *)job->exp_avg_sq)[i] = (u8)encode(part_of(at.v, scale_v), random >> 16, UNSIGNED_BIAS, 0);
}

/* Updates the weight of element i; gives its new moments. */
DEVICE struct moments update(const struct adam_job *job, i64 i) {
    float p = load_master(job, i);
    float g = __fmul_rn(load_as(job->grad_float, job->grad, i), job->grad_scale);
    struct moments at = load_moments(job, i);
    float m = at.m, v = at.v, weight_of_g = job->one_minus_beta1;

    if (job->decay_mode == DECAY_WEIGHT)
        p = __fmul_rn(p, job->decay);
    else
        g = __fmaf_rn(p, job->decay, g);
    if (weight_of_g < 0.5f)
        m = __fmaf_rn(weight_of_g, __fsub_rn(g, m), m);
    else
        m = __fmaf_rn(__fsub_rn(weight_of_g, 1.0f), __fsub_rn(g, m), g);
    v = __fmaf_rn(__fmul_rn(job->one_minus_beta2, g), g, __fmul_rn(v, job->beta2));
    float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), job->bias2_sqrt), job->eps);
    p = __fadd_rn(p, __fdiv_rn(__fmul_rn(job->minus_step_size, m), root));
    store_master(job, i, one_nan(p));
    at.m = one_nan(m);
    at.v = one_nan(v);
    return at;
}

#ifdef __cplusplus
extern "C"
#endif
    __global__ void adam_step(struct adam_job job) {
    for (i64 block = blockIdx.x; block * BLOCK < job.n; block += gridDim.x) {
        i64 i = block * BLOCK + threadIdx.x;
        struct moments at = {0.0f, 0.0f};
        if (i < job.n)
            at = update(&job, i);
        if (job.moments == MOMENTS_U8)
            store_codes(&job, i, at);
        else if (i < job.n)
            store_floats(&job, i, at);
    }
}

/* Sums of squares of blocks of SWAP_BLOCK elements, the last of which may be shorter. */

#define SUM_BLOCK 4096
#define LINE 32

struct squares_job {
    const void *values;
    double *sums;
    i64 n;
    int kind; /* enum swap_float */
};

/* A thread adds for one lane of a line; the lanes are added as the C kernel adds them. */
#ifdef __cplusplus
extern "C"
#endif
    __global__ void block_squares(struct squares_job job) {
    __shared__ double lanes[LINE];
    u32 lane = threadIdx.x;
    for (i64 block = blockIdx.x; block * SUM_BLOCK < job.n; block += gridDim.x) {
        double sum = 0.0;
        i64 stop = block * SUM_BLOCK + SUM_BLOCK;
        stop = stop < job.n ? stop : job.n;
        for (i64 i = block * SUM_BLOCK + lane; i < stop; i += LINE) {
            double value = (double)load_as(job.kind, job.values, i);
            sum = __dadd_rn(sum, __dmul_rn(value, value));
        }
        lanes[lane] = sum;
        __syncthreads();
        for (u32 width = LINE / 2; width > 0; width /= 2) {
            if (lane < width)
                lanes[lane] = __dadd_rn(lanes[lane], lanes[lane + width]);
            __syncthreads();
        }
        if (lane == 0)
            job.sums[block] = lanes[0];
    }
}
