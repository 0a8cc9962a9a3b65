#!/bin/bash
mkdir flower
