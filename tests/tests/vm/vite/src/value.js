export const value = "first";
